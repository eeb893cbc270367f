"""`python -m hvdtrain`, the same function as the `hvdtrain` console script."""

from hvdtrain.cli import main

if __name__ == "__main__":
    main()
