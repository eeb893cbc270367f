"""Models of the scripts, and of their ports to DDP."""

import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.down = nn.Conv2d(before, after, 1, stride=2, bias=False)

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.down(x))


class ResNet(nn.Module):
    def __init__(self, num_classes=1000):
        super().__init__()
        self.layers = nn.Sequential(Block(3, 8), Block(8, 16))
        self.fc = nn.Linear(16, num_classes)

    def forward(self, x):
        return self.fc(self.layers(x).mean((2, 3)))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.rnn = nn.LSTM(16, 32, batch_first=True)
        self.head = nn.Linear(32, 50)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])
