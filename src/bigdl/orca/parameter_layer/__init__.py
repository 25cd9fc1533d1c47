"""BigDL's synchronous SGD on ordinary Spark jobs (Dai et al., "BigDL", SoCC 2019, section 3.3).

All trainable parameters form one flat vector of float32, cut in N slices.  Rank n owns slice n and
the state of the optimizer for it, which is ZeRO-1.  A step is, on every rank at once:

1. :meth:`~.rank.Rank.gradients`: take the weights of all slices, compute the gradient of the own
   rows, cut it in N pieces, one for each owner;
2. :meth:`~.rank.Rank.reduce`: sum the N pieces of the own slice, in the order of the ranks;
3. :meth:`~.rank.Rank.update`: limit the sum, let the optimizer make new weights of the slice.

Between the steps bytes move, and only how they do is the business of a *transport*:

* :mod:`~.shuffle`: stateless tasks, all bytes through Spark's shuffle, so that Spark's lineage
  recovers a lost task or executor.  A group of K steps is chained lazily into one job (the idea of
  Drizzle: Venkataraman et al., SOSP 2017).
* :mod:`~.barrier`: one barrier stage runs a group of K steps, whose ranks talk to each other.  The
  group is the unit of retry.

What is computed does not depend on the transport, nor on K, to the last bit.  Weights of equal
bits on equal machines also need equal numbers of threads, as with any training in torch.

A fit of a user, with epochs, figures and the state of the ranks, is :mod:`~.fit`.
"""
