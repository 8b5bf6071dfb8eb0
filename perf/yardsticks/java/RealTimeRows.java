package perf;

import java.io.FileInputStream;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Set;

import org.apache.arrow.memory.BufferAllocator;
import org.apache.arrow.memory.RootAllocator;
import org.apache.arrow.vector.ipc.ArrowFileReader;
import org.apache.arrow.vector.ipc.message.ArrowBlock;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.read.SupportsPushDownRequiredColumns;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.connector.read.streaming.Offset;
import org.apache.spark.sql.connector.read.streaming.PartitionOffset;
import org.apache.spark.sql.connector.read.streaming.SupportsRealTimeMode;
import org.apache.spark.sql.connector.read.streaming.SupportsRealTimeRead;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.ArrowUtils;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import org.apache.spark.sql.vectorized.ArrowColumnVector;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarBatch;

/**
 * The rows of Arrow files as a source that Spark's real-time mode accepts, for {@code perf.compare}.
 *
 * <p>Spark 4.3 has no such source but Kafka's. This one costs next to nothing, so that what is measured is Spark: the
 * option {@code files} names one Arrow file for each partition, separated by commas; all its rows are there at once, and
 * only the columns that the query needs are made into rows. All batches of a file but the last have the same number of
 * rows.
 */
public final class RealTimeRows implements TableProvider {
  private static final BufferAllocator ALLOCATOR = new RootAllocator();

  @Override
  public StructType inferSchema(CaseInsensitiveStringMap options) {
    try (FileInputStream file = new FileInputStream(files(options)[0]);
        ArrowFileReader reader = new ArrowFileReader(file.getChannel(), ALLOCATOR)) {
      return ArrowUtils.fromArrowSchema(reader.getVectorSchemaRoot().getSchema());
    } catch (IOException error) {
      throw new UncheckedIOException(error);
    }
  }

  @Override
  public Table getTable(StructType schema, Transform[] partitioning, Map<String, String> options) {
    return new Rows(schema, files(new CaseInsensitiveStringMap(options)));
  }

  private static String[] files(CaseInsensitiveStringMap options) {
    return options.get("files").split(",");
  }

  private record Rows(StructType type, String[] files) implements SupportsRead {
    @Override
    public String name() {
      return "rows of Arrow files";
    }

    @Override
    public StructType schema() {
      return type;
    }

    @Override
    public Set<TableCapability> capabilities() {
      return Set.of(TableCapability.MICRO_BATCH_READ);
    }

    @Override
    public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
      return new Pruned(type, files);
    }
  }

  private static final class Pruned implements SupportsPushDownRequiredColumns, Scan {
    private final String[] files;
    private StructType columns;

    Pruned(StructType columns, String[] files) {
      this.columns = columns;
      this.files = files;
    }

    @Override
    public void pruneColumns(StructType required) {
      columns = required;
    }

    @Override
    public Scan build() {
      return this;
    }

    @Override
    public StructType readSchema() {
      return columns;
    }

    @Override
    public MicroBatchStream toMicroBatchStream(String checkpoint) {
      return new Stream(files, columns.fieldNames());
    }
  }

  /** How many rows of each file have been read, as JSON: {@code [100, 90]}. */
  private static final class Rowcounts extends Offset {
    private final long[] counts;

    Rowcounts(long[] counts) {
      this.counts = counts;
    }

    @Override
    public String json() {
      return Arrays.toString(counts);
    }
  }

  private record Position(int file, long rows) implements PartitionOffset {}

  private record Part(int file, String path, long begin, String[] columns) implements InputPartition {}

  private record Stream(String[] files, String[] columns) implements MicroBatchStream, SupportsRealTimeMode {
    @Override
    public Offset initialOffset() {
      return new Rowcounts(new long[files.length]);
    }

    @Override
    public Offset latestOffset() {
      // Spark asks only whether there is anything: where a batch has ended, its readers say themselves.
      long[] counts = new long[files.length];
      Arrays.fill(counts, Long.MAX_VALUE);
      return new Rowcounts(counts);
    }

    @Override
    public Offset deserializeOffset(String json) {
      String numbers = json.replaceAll("[\\[\\]\\s]", "");
      return new Rowcounts(Arrays.stream(numbers.split(",")).mapToLong(Long::parseLong).toArray());
    }

    @Override
    public InputPartition[] planInputPartitions(Offset start, Offset end) {
      return planInputPartitions(start);
    }

    @Override
    public InputPartition[] planInputPartitions(Offset start) {
      long[] begin = ((Rowcounts) start).counts;
      InputPartition[] parts = new InputPartition[files.length];
      for (int file = 0; file < files.length; file++) {
        parts[file] = new Part(file, files[file], begin[file], columns);
      }
      return parts;
    }

    @Override
    public Offset mergeOffsets(PartitionOffset[] ends) {
      long[] counts = new long[files.length];
      for (PartitionOffset end : ends) {
        counts[((Position) end).file()] = ((Position) end).rows();
      }
      return new Rowcounts(counts);
    }

    @Override
    public PartitionReaderFactory createReaderFactory() {
      return new Factory();
    }

    @Override
    public void commit(Offset end) {}

    @Override
    public void stop() {}
  }

  private static final class Factory implements PartitionReaderFactory {
    @Override
    public PartitionReader<InternalRow> createReader(InputPartition partition) {
      try {
        return new Reader((Part) partition);
      } catch (IOException error) {
        throw new UncheckedIOException(error);
      }
    }
  }

  private static final class Reader implements SupportsRealTimeRead<InternalRow> {
    private static final RecordStatus ROW = RecordStatus.newStatusWithoutArrivalTime(true);
    private static final RecordStatus NONE = RecordStatus.newStatusWithoutArrivalTime(false);

    private final Part part;
    private final ArrowFileReader file;
    private final List<ArrowBlock> blocks;
    private int block;
    private ColumnarBatch batch;
    private int row = -1;
    private long read;

    Reader(Part part) throws IOException {
      this.part = part;
      file = new ArrowFileReader(new FileInputStream(part.path()).getChannel(), ALLOCATOR);
      blocks = file.getRecordBlocks();
      read = part.begin();
      load();
      if (read > 0) {
        int batchRows = batch.numRows();
        block = (int) (read / batchRows);
        load();
        row = (int) (read % batchRows) - 1;
      }
    }

    /** Loads the batch of the current block; there is none behind the last one. */
    private void load() throws IOException {
      row = -1;
      if (block >= blocks.size()) {
        batch = null;
        return;
      }
      file.loadRecordBatch(blocks.get(block));
      var root = file.getVectorSchemaRoot();
      ColumnVector[] vectors = Arrays.stream(part.columns())
          .map(name -> new ArrowColumnVector(root.getVector(name)))
          .toArray(ColumnVector[]::new);
      batch = new ColumnarBatch(vectors, root.getRowCount());
    }

    @Override
    public boolean next() throws IOException {
      while (batch != null && ++row >= batch.numRows()) {
        block++;
        load();
      }
      if (batch == null) {
        return false;
      }
      read++;
      return true;
    }

    @Override
    public RecordStatus nextWithTimeout(Long timeoutMs) throws IOException {
      if (next()) {
        return ROW;
      }
      // There will be no more rows, and the first answer without one ends the batch: it lasts as long as it should.
      try {
        Thread.sleep(timeoutMs);
      } catch (InterruptedException error) {
        Thread.currentThread().interrupt();
        throw new IOException(error);
      }
      return NONE;
    }

    @Override
    public PartitionOffset getOffset() {
      return new Position(part.file(), read);
    }

    @Override
    public InternalRow get() {
      return batch.getRow(row);
    }

    @Override
    public void close() throws IOException {
      file.close();
    }
  }
}
