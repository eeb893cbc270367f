"""The data of one rank: `order` divides datasets with an index, `stream` those that are iterated
over, and `loader` yields the batches, for the Trainer and for a loop of one's own.
"""
