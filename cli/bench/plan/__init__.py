"""The replay of a trace on the real policies with learned costs, on virtual time, for each size of the pools."""
