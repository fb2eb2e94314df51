"""The only room that imports transformers: reads configs and facts, builds the modules of one stage, and leaves models
as they are."""
