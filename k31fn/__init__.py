"""k31fn: train Kimi K3.1-class models with pure functions over parameter pytrees in PyTorch."""
