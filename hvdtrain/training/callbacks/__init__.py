"""Callbacks that options choose, one in each file: see `training.callback_list.from_options`.

They are what a user's own callback may be (`training.callback`); those that watch the gradients of
single ranks also ask the stepper which micro-batch is at work.
"""
