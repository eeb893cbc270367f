"""Drive the Trainer from Python: the task and its options in code, under any launcher.

torchrun --nproc-per-node 2 examples/digits.py
"""

from hvdtrain import TrainConfig, Trainer, open_backend
from hvdtrain.tasks.digits import Digits


def main() -> None:
    task = Digits(width=16)
    config = TrainConfig(epochs=5, batch_size=32, lr_scaling="sqrt", schedule="cosine")
    # The backend compares `agree_on` between the ranks before anything trains.
    options, agreed = config.backend_options(), config.agreed()
    with open_backend(options=options, agree_on=agreed) as backend:
        result = Trainer(task, backend, config).fit()
        if backend.world.rank == 0:
            print(f"accuracy {result.metrics['accuracy']:.4f} after {result.steps} steps")


if __name__ == "__main__":  # loader processes import this file
    main()
