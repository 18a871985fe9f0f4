<<<<<<< HEAD
"""Tasks: what a model's outputs are worth. A task gives the loss that is trained on and exact counts to judge by.

Counts are int64, so that sums over clients, workers and any order of arrival are the same to the bit.
=======
"""What is learned: a task turns outputs and targets into a loss, and into counts that add up exactly over clients.

A task is a class under `@task("name")`, made without arguments, with

    loss(outputs, y)      mean loss of a batch, a scalar that carries gradients
    losses(outputs, y)    (n,) loss of each sample
    counts(outputs, y)    (2, C) int64: correct and total, by class
    accuracy(counts)      0..1, from such counts summed
>>>>>>> methods1
"""
