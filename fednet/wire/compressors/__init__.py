"""Compressors of float32 vectors, one a file. `fednet.wire.compress` puts them together."""
