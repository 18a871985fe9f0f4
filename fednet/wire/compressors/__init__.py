"""Compressors of float32 vectors. `fednet.wire.compress` puts them together."""
