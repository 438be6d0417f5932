"""Agreements of all processes: ids, roles, errors, keys, layout, messages, and the generated stubs in wire/pb/.

Also forms that are the same wherever they are read or written: settings, log lines, the files of a model folder.
"""
