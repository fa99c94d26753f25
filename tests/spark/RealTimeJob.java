// Prepares the query of docs/real-time.md for Java: `test_real_time_jvm.py` puts the page's imports and statements here.
// Adds rows until it is told to stop.
import static org.apache.spark.sql.functions.col;
import static org.apache.spark.sql.functions.count;
import static org.apache.spark.sql.functions.max;

import java.nio.file.Files;
import java.nio.file.Paths;
import java.util.List;
import org.apache.spark.sql.Dataset;
import org.apache.spark.sql.Encoders;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.execution.streaming.sources.LowLatencyMemoryStream;
import scala.jdk.javaapi.CollectionConverters;
// IMPORTS

public final class RealTimeJob {
    public static void main(String[] arguments) throws Exception {
        SparkSession spark = SparkSession.builder().getOrCreate();
        LowLatencyMemoryStream<Long> source = LowLatencyMemoryStream.singlePartition(spark, Encoders.LONG());
        Dataset<Row> orders = source.toDF().select(col("value").mod(2).cast("string").as("customer"), col("value").as("price"));
        Dataset<Row> counts = orders.groupBy("customer").agg(count("*").as("count"), max("price").as("max"));
        // STATEMENTS
        for (long next = 0; query.isActive() && !Files.exists(Paths.get("stop")); next++) {
            source.addData(CollectionConverters.asScala(List.of(next)).toSeq());
            Thread.sleep(20);
        }
        System.out.println(query.exception());
        query.stop();
        spark.stop();
    }
}
