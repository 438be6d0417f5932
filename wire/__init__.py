"""Agreements of all processes: ids, roles, errors, keys, layout, messages, and the generated stubs in wire/pb/.

Also common formats: settings, log lines, the files of a model folder.
"""
