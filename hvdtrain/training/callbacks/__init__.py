"""Callbacks that options choose, one in each file: see `training.callback_list.from_options`.

They see the public Trainer alone, as a user's own callback does (`training.callback`).
"""
