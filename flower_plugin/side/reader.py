"""Cached activations as the trainer reads them."""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from .cache import AbsentSamplesError, ActivationCache
from .cache_records import Batch, Namespace
from .recipe import SampleKey


class CacheReader:
    """Reads samples of any tenants from the cache and decodes them, a batch at a time.

    Parameters
    ----------
    cache : ActivationCache
        The store.
    namespace : callable
        Tenant -> the namespace of its samples; all with the same taps and codec.
    width : int
        Width of one row of one tap.

    Attributes
    ----------
    lost : int
        Samples that were asked for in vain: evicted, or damaged. The next stage one asks for them again.
    """

    def __init__(self, store: ActivationCache, namespace: Callable[[str], Namespace], width: int) -> None:
        self._store = store
        self._namespace = cache(namespace)
        self._width = width
        self.lost = 0

    def read(self, keys: Sequence[SampleKey]) -> tuple[Tensor, Tensor, Tensor]:
        """Return states float32 [tokens, taps, width], targets int64 [tokens], tokens per sample [samples].

        Samples that are gone are left out and counted: a cache that is too small costs samples, not the run.
        Where all are gone, the batch is empty: no token, no sample.

        Raises
        ------
        CacheError
            The cache cannot be read.
        """
        one = self._namespace(keys[0].tenant)
        batch = self._fetch([self._namespace(key.tenant).key(key.digest) for key in keys])
        if batch is None:
            nothing = torch.empty(0, dtype=torch.int64)
            return torch.empty(0, len(one.taps), self._width), nothing, nothing.clone()
        return batch.tensors(one.codec, len(one.taps), self._width)

    def _fetch(self, keys: list[bytes]) -> Batch | None:
        # Again and again, since other processes evict meanwhile; each time fewer are asked for.
        while keys:
            try:
                return self._store.fetch(keys)
            except AbsentSamplesError as error:
                gone = {*error.missing, *error.damaged}
                there = [key for key in keys if key not in gone]
                self.lost += len(keys) - len(there)
                keys = there
        return None
