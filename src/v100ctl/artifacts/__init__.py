"""Sources, releases and models on the controller: fetched once, checked by content, kept in a cache."""

from v100ctl.artifacts.cache import Cache
from v100ctl.artifacts.fetch import fetch_engine, fetch_model, fetch_source

__all__ = ["Cache", "fetch_engine", "fetch_model", "fetch_source"]
