"""The size calculator: shapes of models, and the requests that fit on a device."""
