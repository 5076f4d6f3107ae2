"""Device kernels, each beside its plain torch definition.

A function with a plain name is the definition: readable, device-neutral, the specification.
The same name with the prefix `launch_` is the Triton form, with the same arguments and results.
Neither synchronises with the host unless its docstring says so.

Legend of shape suffixes and words: T tokens, K experts per token, P = T * K pairs, E experts of
a layer, H hidden, I expert width, G experts of a group, N ids of a step. A row holds one expert.
"""
