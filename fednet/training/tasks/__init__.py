"""Tasks: what a model's outputs are worth. A task gives the loss that is trained on and exact
counts to judge by.

Counts are int64, so that sums over clients, workers and any order of arrival are the same to the
bit.
"""
