"""This library's parts in the places that other libraries keep for them."""

from lightning_dp.integrations.opacus import ContourAccountant

__all__ = ["ContourAccountant"]
