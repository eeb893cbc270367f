"""Private names of torch that hvdtrain uses, one file per subject.

Each file says what it relies on, and what happens without it. `tests/test_torch_private.py` fails
with the name of what is missing when a torch changes one of them. It also lists names that one file
uses and nothing could replace, such as the options of Gloo in `transports/gloo.py`.
"""
