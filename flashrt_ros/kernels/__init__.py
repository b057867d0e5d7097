"""
The operations a layer needs, cut where a fused decode kernel is cut.

Each module holds one operation in its torch reference form, which is also the CPU form. All of
them keep to signatures that one device launch can have: plain tensors and scalars in, *state
tensors updated in place*, the result returned. The leading axis of activations is the token axis
``T``; one token (``T == 1``) takes the decode path, more take the chunked path.

=============== ==================================================================================
module          operation
=============== ==================================================================================
``norm``        RMS norm, the factor shared by the others
``linear``      normed linear; linear with a residual epilogue
``convolution`` short convolution on the window in place, alone or between two gates
``delta``       short convolution + gates + gated delta rule + gated norm on the state in place
``attention``   QK norm + rotary + row append + attention over live rows (+ output gate)
``mlp``         normed, gated MLP with residual
``head``        final norm of the last token + vocabulary product
=============== ==================================================================================
"""
