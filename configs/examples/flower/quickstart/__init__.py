"""A Flower app: its files know nothing of fednet."""
