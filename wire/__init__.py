"""What all processes agree on: ids, errors, keys, layout, messages, and the generated stubs in wire/pb/."""
