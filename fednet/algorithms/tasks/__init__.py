"""What is learned: a task turns outputs and targets into a loss, and into counts that add up exactly over clients.

A task is a class under `@task("name")`, made without arguments, with

    loss(outputs, y)      mean loss of a batch, a scalar that carries gradients
    losses(outputs, y)    (n,) loss of each sample
    counts(outputs, y)    (2, C) int64: correct and total, by class
    accuracy(counts)      0..1, from such counts summed
"""
