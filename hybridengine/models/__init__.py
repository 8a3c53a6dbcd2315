"""What is true of a model whichever engine runs it: its configuration's facts, logits, rotary tables, buffers."""
