"""A model's chat template: its processes, and the turns that it takes."""
