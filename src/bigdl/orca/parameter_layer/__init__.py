"""BigDL's synchronous SGD on ordinary Spark jobs (Dai et al., "BigDL", SoCC 2019, section 3.3).

All trainable parameters form one flat float32 vector, split into N slices.  Rank n owns slice n and
its optimizer state, as in ZeRO-1.  Every rank runs these phases of a step at the same time:

1. :meth:`~.rank.Rank.gradients`: receive the weights of all slices, compute the gradient of the
   local rows, and split it into N pieces, one for each owner;
2. :meth:`~.rank.Rank.reduce`: sum the N pieces of the owned slice, in rank order;
3. :meth:`~.rank.Rank.update`: clip the sum and update the slice with the optimizer.

A *transport* moves the bytes between the phases:

* :mod:`~.shuffle`: stateless tasks send all bytes through Spark's shuffle, so that Spark's lineage
  recovers a lost task or executor.  A group of K steps is one lazily chained job (the idea of
  Drizzle: Venkataraman et al., SOSP 2017).
* :mod:`~.barrier`: one barrier stage runs a group of K steps, whose ranks communicate directly.
  The group is the unit of retry.

The results are bitwise independent of the transport and of K.  As with any torch training, bitwise
equal weights also need equal machines and numbers of threads.

:mod:`~.fit` adds epochs, metrics and checkpoints.
"""
