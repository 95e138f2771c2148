"""What to do. One question per file; each answer is a value made from a frozen view, with its reason."""
