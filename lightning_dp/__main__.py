"""Makes ``python -m lightning_dp`` the same as ``lightning-dp``."""

from lightning_dp.cli import main

if __name__ == "__main__":
    main()
