"""One run over several hosts: the ranks that torchrun started agree before they train."""
