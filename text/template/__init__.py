"""A model's chat template: the processes that render it, and the turns that it takes."""
