"""Data, networks and objectives of the documents' applications; each folder can be deleted."""
