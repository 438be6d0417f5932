"""What a cluster is to be: settings, model, machine, sizes, and the plan that follows from them."""
