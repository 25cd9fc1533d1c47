"""``NNImageReader``, which reads image folders into Spark DataFrames."""

import functools

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError, require
from bigdl.orca.cluster.spark_calls import silent_when_closed
from bigdl.orca.data.xshards.connect import rows_of


class NNImageReader:
    """Reads images into DataFrames with Spark's image schema.

    Examples
    --------
    >>> from PIL import Image
    >>> from bigdl.orca import init_orca_context
    >>> from bigdl.orca.learn.nnframes import NNImageReader
    >>> sc = init_orca_context("local", cores=2)
    >>> Image.new("RGB", (8, 6)).save("photo.png")
    >>> image = NNImageReader.readImages("photo.png", sc, resizeH=3, resizeW=4).first().image
    >>> image.height, image.width, image.nChannels
    (3, 4, 3)
    """

    @staticmethod
    def readImages(
        path: str,
        sc=None,
        minPartitions: int = 1,
        resizeH: int = -1,
        resizeW: int = -1,
        image_codec: int = -1,
        bigdl_type: str = "float",
    ):
        """Read the images of a folder; skip files that are not images.

        Parameters
        ----------
        path : str
            Folder or glob pattern, on any file system that Spark supports.
        sc : SparkContext, optional
            Accepted for compatibility and ignored: the active session is used.
        minPartitions : int
            Minimum number of partitions.
        resizeH, resizeW : int
            Height and width to resize to (requires Pillow); default the original size.
        image_codec, bigdl_type
            Accepted for compatibility and ignored.

        Returns
        -------
        pyspark.sql.DataFrame
            One column ``image`` with origin, height, width, nChannels, mode and data (BGR rows).
        """
        from bigdl.orca.context import OrcaContext

        if (resizeH > 0) != (resizeW > 0):
            raise UsageError(
                f"resizeH and resizeW must be given together, got {resizeH} and {resizeW}",
                code="argument-missing",
                argument="resizeH",
            )
        spark = OrcaContext.get_spark_session()
        frame = spark.read.format("image").option("dropInvalid", True).load(path)
        if rows_of(frame).getNumPartitions() < check_positive("minPartitions", minPartitions):
            frame = frame.repartition(minPartitions)
        if resizeH <= 0:
            return frame
        require("PIL", "nano")
        resized = functools.partial(_resize, height=resizeH, width=resizeW)
        return frame.mapInArrow(silent_when_closed(resized), frame.schema)


def _resize(batches, height, width):
    """Resize the images in Arrow record batches."""
    import pyarrow as pa
    from PIL import Image

    for batch in batches:
        made = []
        for row in batch.column("image").to_pylist():
            mode = {1: "L", 3: "RGB", 4: "RGBA"}[row["nChannels"]]
            size = (row["width"], row["height"])
            # channels are resized independently, so their order does not matter
            image = Image.frombytes(mode, size, row["data"])
            data = image.resize((width, height), Image.Resampling.BILINEAR).tobytes()
            made.append({**row, "height": height, "width": width, "data": data})
        yield pa.RecordBatch.from_arrays(
            [pa.array(made, batch.schema.field("image").type)], schema=batch.schema
        )
