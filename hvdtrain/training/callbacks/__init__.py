"""Callbacks that options choose, one in each file: `training.callback_list` has the table.

They use what a user's own callback may use (`training.callback`), and no more.
"""
