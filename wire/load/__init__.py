"""Load control: bounds on units in use at a time, and fair shares of tenants."""
