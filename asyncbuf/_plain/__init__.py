"""Values as plain data: trees, codecs, and checks of states."""
