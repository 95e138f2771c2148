"""Where processes come from: this machine. (Slurm and Kubernetes come later.)"""
