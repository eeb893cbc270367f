"""The built-in tasks: a name maps to "module:Class", imported on use."""

TASKS = {
    "digits": "hvdtrain.tasks.digits:Digits",
    "mlp": "hvdtrain.tasks.mlp:MLP",
    "convnet": "hvdtrain.tasks.convnet:ConvNet",
    "transformer": "hvdtrain.tasks.transformer:Transformer",
}
