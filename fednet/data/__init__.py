"""Datasets, how they are divided between clients, and the samples of one site.

    data = loading.load(section, root, seed)                   # every sample, one tensor a split
    federation = division.split(data, section, clients, seed)  # who holds which of them
    site = federation.site(3, "cuda:0")                        # one client's slice: model inputs

This file imports nothing, so that listing the datasets imports no torch.
"""
