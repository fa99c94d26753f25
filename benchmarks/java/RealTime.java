package benchmarks;

import java.io.BufferedOutputStream;
import java.io.DataOutputStream;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.io.UncheckedIOException;
import java.net.Socket;
import java.nio.charset.StandardCharsets;
import java.time.Instant;
import java.util.ArrayList;
import java.util.List;
import org.apache.spark.sql.ForeachWriter;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.execution.streaming.sources.LowLatencyMemoryStream;
import scala.jdk.javaapi.CollectionConverters;

/** The JVM's side of `make bench ARGS=real_time`: a source, a writer that is timed, and a writer to Redis. */
public final class RealTime {
    private RealTime() {}

    /** Microseconds since 1970, as Python's clock has them. */
    private static long nowUs() {
        Instant now = Instant.now();
        return now.getEpochSecond() * 1_000_000 + now.getNano() / 1_000;
    }

    /** Adds records to a stream in memory at a rate: each is its number, and the time at which it was made. */
    public static final class Source extends Thread {
        private final LowLatencyMemoryStream<String> stream;
        private final int recordsPerSecond;
        private volatile boolean isEnding;

        public Source(LowLatencyMemoryStream<String> stream, int recordsPerSecond) {
            this.stream = stream;
            this.recordsPerSecond = recordsPerSecond;
            setDaemon(true);
        }

        @Override
        public void run() {
            long began = System.nanoTime();
            long sent = 0;
            try {
                while (!isEnding) {
                    long due = (long) ((System.nanoTime() - began) * 1e-9 * recordsPerSecond);
                    List<String> records = new ArrayList<>();
                    for (; sent < due; sent++) {
                        records.add(sent + " " + nowUs());
                    }
                    if (!records.isEmpty()) {
                        stream.addData(CollectionConverters.asScala(records).toSeq());
                    }
                    Thread.sleep(1);
                }
            } catch (InterruptedException error) {
                Thread.currentThread().interrupt();
            }
        }

        public void end() {
            isEnding = true;
        }
    }

    /** Writes the time at which it gets each row to a file: key i64 | value i64 | time i64, and passes the row to a writer. */
    public static final class Timed extends ForeachWriter<Row> {
        private final ForeachWriter<Row> writer;
        private final String folder;
        private transient DataOutputStream times;

        public Timed(ForeachWriter<Row> writer, String folder) {
            this.writer = writer;
            this.folder = folder;
        }

        /** The log has epoch 0 already, before the query's batch 0. */
        @Override
        public boolean open(long partition, long batch) {
            try {
                String path = folder + "/" + batch + "-" + partition;
                times = new DataOutputStream(new BufferedOutputStream(new FileOutputStream(path)));
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
            return writer.open(partition, batch + 1);
        }

        @Override
        public void process(Row row) {
            try {
                times.writeLong(Long.parseLong(row.getString(0)));
                times.writeLong(row.getLong(1));
                times.writeLong(nowUs());
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
            writer.process(row);
        }

        @Override
        public void close(Throwable error) {
            writer.close(error);
            try {
                times.close();
            } catch (IOException failure) {
                throw new UncheckedIOException(failure);
            }
        }
    }

    /** Sends a SET for each row at once, and waits for no reply. */
    public static final class RedisWriter extends ForeachWriter<Row> {
        private final int port;
        private final String prefix;
        private transient Socket socket;
        private transient OutputStream out;

        public RedisWriter(int port, String prefix) {
            this.port = port;
            this.prefix = prefix;
        }

        @Override
        public boolean open(long partition, long batch) {
            try {
                socket = new Socket("127.0.0.1", port);
                socket.setTcpNoDelay(true);
                out = socket.getOutputStream();
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
            Thread reading = new Thread(this::read, "redis-replies");
            reading.setDaemon(true);
            reading.start();
            return true;
        }

        private void read() {
            byte[] replies = new byte[1 << 16];
            try (InputStream in = socket.getInputStream()) {
                while (in.read(replies) >= 0) {}
            } catch (IOException error) {
                return; // closed
            }
        }

        @Override
        public void process(Row row) {
            String key = prefix + row.getString(0);
            String value = Long.toString(row.getLong(1));
            String request = "*3\r\n$3\r\nSET\r\n$" + key.length() + "\r\n" + key + "\r\n$" + value.length() + "\r\n" + value + "\r\n";
            try {
                out.write(request.getBytes(StandardCharsets.US_ASCII));
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
        }

        @Override
        public void close(Throwable error) {
            try {
                socket.close();
            } catch (IOException failure) {
                throw new UncheckedIOException(failure);
            }
        }
    }
}
