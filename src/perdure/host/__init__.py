"""One machine, read: processes, memory, processors. Knows files of the kernel; knows no job, rank or decision."""
