"""What a check takes of the machine, on paper: memory of all its processes at the fullest moment, and files.

Bytes an element of the model in the reference (e 8 wide; as shipped 4, all of it counted in fp32 types), of which a step's
record holds gradient, clipped gradient, two moments, weight and published weight, 6 e:

    wide         48   weights as computed and as updated, gradients, clipped ones, two moments
                 96   the record of a step, and of the one before
                 16   what is added to the gradients; the slack of the weights
    as shipped   24   the same six
                 52   the records of the start and of the step, and that of a disturbed run
                 60   how far disturbed runs lie apart, in fp64; what is added to the gradients

The ranks are counted wide, twice the bytes of their bill (design/cost/memory.py), with a record of their slices beside it
(48 e/8, and the initial weights). Files: the start e, each wide step 6 e and its slack, the one step as shipped as much.
To these come what modules give and get back: every recorded output and its gradient, and for each process what
a microbatch keeps for backward, and its largest tensor while it is compared.
"""
