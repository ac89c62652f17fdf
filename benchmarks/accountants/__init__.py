"""What `benchmarks/accounting.py` compares: this library, others, and the truth."""
