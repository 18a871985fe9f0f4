"""The app's model, data and training. The data are generated: nothing is downloaded."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 4
FEATURES = 16


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Linear(FEATURES, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, CLASSES)
        )


def load_data(partition_id: int, num_partitions: int, batch_size: int):
    """The samples of one of the partitions: 80 % for training, 20 % for tests."""
    made = torch.Generator().manual_seed(1 + partition_id)
    centers = 2 * torch.eye(FEATURES)[:CLASSES]
    y = torch.randint(CLASSES, (1000 // num_partitions,), generator=made)
    x = centers[y] + torch.randn(len(y), FEATURES, generator=made)
    cut = len(y) * 4 // 5
    trainloader = DataLoader(TensorDataset(x[:cut], y[:cut]), batch_size, shuffle=True)
    return trainloader, DataLoader(TensorDataset(x[cut:], y[cut:]), batch_size)


def train(net, trainloader, epochs, lr):
    """Train, and return the mean loss of the batches."""
    net.train()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr, momentum=0.9)
    total = 0.0
    for _ in range(epochs):
        for x, y in trainloader:
            optimizer.zero_grad()
            loss = criterion(net(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(trainloader))
