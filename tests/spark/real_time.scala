// Prepares the query of docs/real-time.md for Scala: `test_real_time_jvm.py` runs this, then the page's statements,
// then adds rows until it is told to stop.
import java.nio.file.{Files, Paths}
import org.apache.spark.sql.execution.streaming.sources.LowLatencyMemoryStream
import org.apache.spark.sql.functions.{count, max}
import spark.implicits._

val source = LowLatencyMemoryStream.singlePartition[Long](spark)
val orders = source.toDF().select(($"value" % 2).cast("string").as("customer"), $"value".as("price"))
val counts = orders.groupBy("customer").agg(count("*").as("count"), max("price").as("max"))

// PAGE

var next = 0L
while (query.isActive && !Files.exists(Paths.get("stop"))) { source.addData(Seq(next)); next += 1; Thread.sleep(20) }
println(query.exception)
query.stop()
:quit
