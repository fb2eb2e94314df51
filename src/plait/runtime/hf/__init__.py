"""The only room that imports transformers: reads configs and facts, builds the modules of one stage, leaves models as they are."""
