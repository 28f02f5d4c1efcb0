"""What a forward costs by its shapes alone: operations, bytes moved and bytes kept, counted on the meta device.

`residua.model.sizes_of` counts the stream of a model with it, and `residua.lab.cost.predict` a whole model.
"""
