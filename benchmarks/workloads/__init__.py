"""What `benchmarks/training.py` trains, and with what."""
