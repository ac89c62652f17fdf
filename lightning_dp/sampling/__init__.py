"""Which records take part in an update: Poisson sampling, its loader, and the secret randomness behind it."""

from lightning_dp.sampling.entropy import KeyStream, insecure_key, secret_key
from lightning_dp.sampling.loader import ChunkInfo, PrivateDataLoader, check_loader, fingerprint
from lightning_dp.sampling.null_record import null_record
from lightning_dp.sampling.poisson import ChunkIndices, PoissonSampler
from lightning_dp.sampling.public import PublicDataLoader

__all__ = [
    "ChunkIndices",
    "ChunkInfo",
    "KeyStream",
    "PoissonSampler",
    "PrivateDataLoader",
    "PublicDataLoader",
    "check_loader",
    "fingerprint",
    "insecure_key",
    "null_record",
    "secret_key",
]
