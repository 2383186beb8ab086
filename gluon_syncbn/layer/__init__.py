"""The record of a layer, and the decision whether a call synchronizes."""
