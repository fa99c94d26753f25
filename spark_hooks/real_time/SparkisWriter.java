package io.github.sparkis;

import java.io.ByteArrayOutputStream;
import java.io.DataInputStream;
import java.io.EOFException;
import java.io.IOException;
import java.net.Socket;
import java.nio.charset.StandardCharsets;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.spark.TaskContext;
import org.apache.spark.sql.ForeachWriter;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.catalyst.encoders.ExpressionEncoder;
import org.apache.spark.sql.catalyst.expressions.UnsafeRow;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.StructType;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Sends each row of a query to the state servers of a job as soon as the query emits it, as "fresh values".
 *
 * <p>Each executor has one connection and one thread for each server, which all partitions and batches share. Every
 * server gets every row, and keeps those of its slots. Requests (RESP2; rows are Spark's UnsafeRows):
 *
 * <pre>
 * STATE FRESH OPEN  job run batch partition schema
 * STATE FRESH ROWS  job run batch partition (size u32 little endian | row)...
 * STATE FRESH CLOSE job run batch partition sent dropped
 * </pre>
 *
 * <p>The query never waits for a server. Rows wait while a server does not open their batch, because it does not know
 * the job yet, for example. Rows that a server cannot take are dropped and counted: the commit of the batch shows their
 * values. A server that is away is connected again within the batch; it gets the rows from then on.
 *
 * <p>The source uses no lambdas and no inferred types, so that Janino compiles it as well as javac. For the same reason
 * the class has a parameter, which is always {@code Row}: Janino makes no bridge methods.
 */
public final class SparkisWriter<T> extends ForeachWriter<T> {
    private static final long serialVersionUID = 1L;
    private static final Logger LOG = LoggerFactory.getLogger("sparkis.writer");

    // Rows wait for others this long. Also bounds the wake-ups of a thread.
    private static final int FLUSH_MS = 2;
    // A request has about this size at most: a server handles it in a few milliseconds (guess).
    private static final int FRAME_BYTES = 1 << 16;
    // A request's rows have at most 1 MiB (proto-max-bulk-len of a server): a frame, and one row more.
    private static final int ROW_BYTES_MAX = (1 << 20) - FRAME_BYTES - 4;
    // What waits for one server in one executor.
    private static final int WAITING_BYTES_MAX = 8 << 20;
    private static final int TIMEOUT_MS = 10000;
    private static final int CONNECT_TIMEOUT_MS = 1000;
    // The pause after a failed connection, and after an error for a batch.
    private static final int RETRY_MS = 500;
    // A connection without rows ends after this time.
    private static final int IDLE_MS_MAX = 60000;

    private static final Map<ServerAddress, Link> LINKS = new HashMap<ServerAddress, Link>();

    private final String job;
    private final String schema;
    private volatile String servers;
    private String[] tlsFiles = {"", "", ""};

    private transient ExpressionEncoder.Serializer<Row> serializer;
    private transient Link[] links;
    private transient Stream[] streams;

    /**
     * @param job the job whose keys get the values
     * @param schema the schema of the rows, as Spark's JSON
     * @param servers the addresses of all state servers of the job, with commas between them: {@code redis://HOST:PORT},
     *     {@code rediss://} for TLS, with {@code :PASSWORD@} or {@code USER:PASSWORD@} before the host
     */
    public SparkisWriter(String job, String schema, String servers) {
        this.job = job;
        this.schema = schema;
        setServers(servers);
    }

    /**
     * Set the PEM files that connections with TLS need, on each executor's machine; empty: none.
     *
     * @param certFile the certificate that servers ask for; without a CA it is also the only one that is trusted
     * @param keyFile its key, in the form PKCS#8
     * @param caCertFile the CA that has signed the servers' certificates
     */
    public SparkisWriter<T> withTls(String certFile, String keyFile, String caCertFile) {
        tlsFiles = new String[] {certFile, keyFile, caCertFile};
        return this;
    }

    private ServerAddress[] addresses() {
        String[] urls = servers.isEmpty() ? new String[0] : servers.split(",");
        ServerAddress[] found = new ServerAddress[urls.length];
        for (int index = 0; index < urls.length; index++) {
            found[index] = new ServerAddress(urls[index].trim(), tlsFiles);
        }
        return found;
    }

    /** Send the rows of the next batches to these servers. Runs on the driver: Spark sends this object with each batch. */
    public void setServers(String servers) {
        this.servers = servers;
        addresses(); // raises the error of an address that is none
    }

    /** Runs on an executor, at the begin of a partition of a batch. The run is the name of the query's job group. */
    @Override
    public boolean open(long partition, long batch) {
        String run = TaskContext.get().getLocalProperty("spark.jobGroup.id");
        StructType type = ((StructType) DataType.fromJson(schema)).asNullable();
        serializer = (ExpressionEncoder.Serializer<Row>) ExpressionEncoder.apply(type, true).createSerializer();
        ServerAddress[] addresses = addresses();
        links = new Link[addresses.length];
        streams = new Stream[addresses.length];
        for (int index = 0; index < addresses.length; index++) {
            links[index] = Link.of(addresses[index]);
            streams[index] = new Stream(new String[] {job, run, Long.toString(batch), Long.toString(partition)}, schema);
            links[index].open(streams[index]);
        }
        return true;
    }

    @Override
    public void process(T row) {
        byte[] bytes = ((UnsafeRow) serializer.apply((Row) row)).getBytes();
        for (int index = 0; index < links.length; index++) {
            links[index].add(streams[index], bytes);
        }
    }

    /** Returns at once. After an error the rows stay until Spark's next run opens the batch. */
    @Override
    public void close(Throwable error) {
        if (links == null) {
            return;
        }
        for (int index = 0; index < links.length; index++) {
            links[index].close(streams[index], error == null);
        }
        links = null;
    }

    /** Rows that are sent together. */
    private static final class Frame extends ByteArrayOutputStream {
        int rows;
    }

    /** The rows of a partition in a batch, for one server. The lock of its link guards it. */
    private static final class Stream {
        final String[] names;
        final String schema;
        final ArrayDeque<Frame> frames = new ArrayDeque<Frame>();
        int connection = -1; // on which it was opened
        long refusedAtMs;
        String error; // with which it was refused last
        boolean isRefused;
        boolean isClosed;
        boolean hasClose;
        long sent;
        long dropped;

        Stream(String[] names, String schema) {
            this.names = names;
            this.schema = schema;
        }

        void append(byte[] row) {
            Frame frame = (Frame) frames.peekLast();
            if (frame == null || frame.size() >= FRAME_BYTES) {
                frame = new Frame();
                frames.addLast(frame);
            }
            frame.write(row.length);
            frame.write(row.length >>> 8);
            frame.write(row.length >>> 16);
            frame.write(row.length >>> 24);
            frame.write(row, 0, row.length);
            frame.rows++;
            sent++;
        }

        /** Drop the rows that wait; return their bytes. */
        int drop() {
            int bytes = 0;
            while (!frames.isEmpty()) {
                Frame frame = (Frame) frames.removeFirst();
                count(frame.rows);
                bytes += frame.size();
            }
            return bytes;
        }

        /** Count rows that were to be sent as dropped. */
        void count(int rows) {
            dropped += rows;
            sent -= rows;
        }
    }

    /** The connection of this executor to one server, and its thread. */
    private static final class Link implements Runnable {
        private final ServerAddress address;
        // Guarded by this object's lock.
        private final LinkedHashMap<Stream, Stream> streams = new LinkedHashMap<Stream, Stream>();
        private int waitingBytes;
        private boolean isAway;
        private boolean isWaiting;
        private boolean hasRefused; // a batch, which it is asked to open again
        // Of the thread.
        private Socket socket;
        private DataInputStream replies;
        private int connection;
        private boolean hasFailed;

        private Link(ServerAddress address) {
            this.address = address;
        }

        static Link of(ServerAddress address) {
            synchronized (LINKS) {
                Link link = (Link) LINKS.get(address);
                if (link == null) {
                    link = new Link(address);
                    LINKS.put(address, link);
                    Thread thread = new Thread(link, "sparkis-writer-" + address);
                    thread.setDaemon(true);
                    thread.start();
                }
                link.touch();
                return link;
            }
        }

        /** Keep the thread alive: a caller of {@code of} will open a stream. */
        private synchronized void touch() {
            isWaiting = true;
        }

        synchronized void open(Stream stream) {
            streams.put(stream, stream);
            isWaiting = true;
            notifyAll();
        }

        synchronized void add(Stream stream, byte[] row) {
            if (isAway || row.length > ROW_BYTES_MAX) {
                stream.dropped++;
                return;
            }
            if (waitingBytes + row.length + 4 > WAITING_BYTES_MAX) {
                dropRefused();
            }
            if (waitingBytes + row.length + 4 > WAITING_BYTES_MAX) {
                dropWaiting(); // the newest rows are worth most
            }
            stream.append(row);
            waitingBytes += row.length + 4;
            if (!isWaiting) {
                isWaiting = true;
                notifyAll();
            }
        }

        synchronized void close(Stream stream, boolean isComplete) {
            stream.isClosed = true;
            stream.hasClose = isComplete;
            if (!isWaiting) {
                isWaiting = true;
                notifyAll();
            }
        }

        /** Drop the rows of batches that the server does not open, so that they take no room of others. */
        private void dropRefused() {
            for (Object each : streams.keySet()) {
                if (((Stream) each).isRefused) {
                    waitingBytes -= ((Stream) each).drop();
                }
            }
        }

        private void dropWaiting() {
            for (Object each : streams.keySet()) {
                ((Stream) each).drop();
            }
            waitingBytes = 0;
        }

        @Override
        public void run() {
            try {
                while (true) {
                    synchronized (this) {
                        if (!isWaiting) {
                            wait(hasRefused ? RETRY_MS : IDLE_MS_MAX);
                        }
                    }
                    Thread.sleep(FLUSH_MS);
                    if (endsIdle()) {
                        return;
                    }
                    exchange();
                }
            } catch (InterruptedException error) {
                remove();
            } finally {
                disconnect();
            }
        }

        /** Return whether this link was removed, because nobody uses it. */
        private boolean endsIdle() {
            synchronized (LINKS) {
                synchronized (this) {
                    boolean isIdle = !isWaiting && streams.isEmpty();
                    if (isIdle) {
                        LINKS.remove(address);
                    }
                    return isIdle;
                }
            }
        }

        private void remove() {
            synchronized (LINKS) {
                LINKS.remove(address);
            }
        }

        /** Send what waits, and read the replies. A connection that breaks is made anew once, with the same requests. */
        private void exchange() throws InterruptedException {
            List<Request> requests = null;
            for (int attempt = 0; attempt < 2; attempt++) {
                try {
                    if (socket == null) {
                        connect();
                    }
                    requests = requests == null ? taken() : opened(requests);
                    send(requests);
                    receive(requests);
                    if (hasFailed) {
                        LOG.info("{} gets rows again", address);
                    }
                    hasFailed = false;
                    return;
                } catch (Exception error) {
                    boolean isNew = socket == null;
                    disconnect();
                    if (isNew || attempt == 1) {
                        fail(requests, error);
                        return;
                    }
                }
            }
        }

        /** Count the rows of requests, and all that wait, as dropped; pause. */
        private void fail(List<Request> requests, Exception error) throws InterruptedException {
            if (!hasFailed) {
                LOG.warn("{} gets no rows: {}; readers of it see committed values", address, error.toString());
            }
            hasFailed = true;
            synchronized (this) {
                isAway = true;
                if (requests != null) {
                    for (int index = 0; index < requests.size(); index++) {
                        Request request = (Request) requests.get(index);
                        request.stream.count(request.rows);
                    }
                }
                dropWaiting();
                dropClosed();
                isWaiting = !streams.isEmpty();
            }
            Thread.sleep(RETRY_MS);
        }

        /** Forget the partitions that are closed: nobody asks this server for their values any more. */
        private void dropClosed() {
            for (Object each : new ArrayList<Stream>(streams.keySet())) {
                if (((Stream) each).isClosed) {
                    streams.remove(each);
                }
            }
        }

        /** Return the requests for what waits, in order. Rows follow the reply to the request that opens their batch. */
        private synchronized List<Request> taken() {
            List<Request> requests = new ArrayList<Request>();
            isAway = false;
            isWaiting = false;
            hasRefused = false;
            for (Object each : new ArrayList<Stream>(streams.keySet())) {
                Stream stream = (Stream) each;
                if (stream.connection == connection) {
                    take(stream, requests);
                } else if (stream.isRefused && System.currentTimeMillis() - stream.refusedAtMs < RETRY_MS) {
                    hasRefused = true;
                } else {
                    open(stream, requests);
                    isWaiting = true;
                }
            }
            return requests;
        }

        private void take(Stream stream, List<Request> requests) {
            while (!stream.frames.isEmpty()) {
                Frame frame = (Frame) stream.frames.removeFirst();
                requests.add(new Request(stream, "ROWS", frame.toByteArray(), frame.rows));
                waitingBytes -= frame.size();
            }
            if (stream.isClosed) {
                streams.remove(stream);
                if (stream.hasClose) {
                    requests.add(new Request(stream, "CLOSE", null, 0));
                }
            }
        }

        private void open(Stream stream, List<Request> requests) {
            stream.connection = connection;
            stream.isRefused = false;
            requests.add(new Request(stream, "OPEN", stream.schema.getBytes(StandardCharsets.UTF_8), 0));
        }

        /** Return requests for a new connection, on which their streams have to be opened. */
        private synchronized List<Request> opened(List<Request> requests) {
            List<Request> found = new ArrayList<Request>();
            for (int index = 0; index < requests.size(); index++) {
                Request request = (Request) requests.get(index);
                if (request.stream.connection != connection) {
                    open(request.stream, found);
                }
                if (!request.verb.equals("OPEN")) {
                    found.add(request);
                }
            }
            return found;
        }

        private void connect() throws IOException {
            Socket connected = address.connect(CONNECT_TIMEOUT_MS, TIMEOUT_MS);
            try {
                replies = new DataInputStream(new java.io.BufferedInputStream(connected.getInputStream()));
                if (!address.password.isEmpty()) {
                    connected.getOutputStream().write(command(address.login()));
                    String error = reply();
                    if (error != null) {
                        throw new IOException(error);
                    }
                }
            } catch (IOException error) {
                connected.close();
                throw error;
            }
            socket = connected;
            connection++;
        }

        private void disconnect() {
            if (socket != null) {
                try {
                    socket.close();
                } catch (IOException error) {
                    LOG.debug("{} could not be closed", address, error);
                }
            }
            socket = null;
        }

        private void send(List<Request> requests) throws IOException {
            ByteArrayOutputStream out = new ByteArrayOutputStream();
            for (int index = 0; index < requests.size(); index++) {
                out.write(((Request) requests.get(index)).bytes());
            }
            socket.getOutputStream().write(out.toByteArray());
        }

        private void receive(List<Request> requests) throws IOException {
            for (int index = 0; index < requests.size(); index++) {
                String error = reply();
                if (error != null) {
                    refuse((Request) requests.get(index), error);
                }
            }
        }

        /** Let the rows of a partition wait until the server is asked again, unless the partition has ended. */
        private synchronized void refuse(Request request, String error) {
            Stream stream = request.stream;
            if (!error.equals(stream.error)) {
                String[] names = stream.names;
                stream.error = error;
                LOG.warn("{} takes no rows of job {}, batch {}, partition {}: {}",
                    new Object[] {address, names[0], names[2], names[3], error});
            }
            stream.isRefused = true;
            stream.refusedAtMs = System.currentTimeMillis();
            stream.connection = -1;
            stream.count(request.rows);
            if (stream.isClosed) {
                waitingBytes -= stream.drop();
                streams.remove(stream);
            }
        }

        /** Read one reply; return its error, or null. */
        private String reply() throws IOException {
            int kind = replies.read();
            if (kind < 0) {
                throw new EOFException("the connection was closed");
            }
            ByteArrayOutputStream line = new ByteArrayOutputStream();
            for (int next = replies.read(); next != '\n'; next = replies.read()) {
                if (next < 0) {
                    throw new EOFException("the connection was closed");
                }
                line.write(next);
            }
            return kind == '-' ? line.toString("UTF-8").trim() : null;
        }
    }

    /** A request and the number of its rows. */
    private static final class Request {
        final Stream stream;
        final String verb;
        final byte[] content;
        final int rows;

        Request(Stream stream, String verb, byte[] content, int rows) {
            this.stream = stream;
            this.verb = verb;
            this.content = content;
            this.rows = rows;
        }

        byte[] bytes() throws IOException {
            String[] names = stream.names;
            if (content == null) {
                return command(new Object[] {"STATE", "FRESH", verb, names[0], names[1], names[2], names[3],
                    Long.toString(stream.sent), Long.toString(stream.dropped)});
            }
            return command(new Object[] {"STATE", "FRESH", verb, names[0], names[1], names[2], names[3], content});
        }
    }

    private static byte[] command(Object[] words) throws IOException {
        ByteArrayOutputStream out = new ByteArrayOutputStream();
        out.write(("*" + words.length + "\r\n").getBytes(StandardCharsets.UTF_8));
        for (int index = 0; index < words.length; index++) {
            Object word = words[index];
            byte[] bytes = word instanceof byte[] ? (byte[]) word : ((String) word).getBytes(StandardCharsets.UTF_8);
            out.write(("$" + bytes.length + "\r\n").getBytes(StandardCharsets.UTF_8));
            out.write(bytes);
            out.write("\r\n".getBytes(StandardCharsets.UTF_8));
        }
        return out.toByteArray();
    }
}
