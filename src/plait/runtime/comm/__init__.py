"""The only room that imports torch.distributed: processes, groups, collectives, and the ledger of what they moved."""
